"""Train a draft for a model; the options are in conf/train_draft.yaml."""

from tempera.commands.scripts import train as main

if __name__ == "__main__":
    main()
