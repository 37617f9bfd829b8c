"""Encode captions and images to shards of codes; the options are in conf/prepare.yaml."""

from tempera.commands.scripts import prepare as main

if __name__ == "__main__":
    main()
