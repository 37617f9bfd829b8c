"""Score pictures without the model that drew them; the options are in conf/score.yaml."""

from tempera.commands.scripts import score as main

if __name__ == "__main__":
    main()
