"""Find the fastest setting within a budget; the options are in conf/tune.yaml."""

from tempera.commands.scripts import tune as main

if __name__ == "__main__":
    main()
