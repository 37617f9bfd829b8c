"""Train the networks of the shipped model; the options are in conf/build_shapes.yaml."""

from tempera.commands.scripts import build as main

if __name__ == "__main__":
    main()
