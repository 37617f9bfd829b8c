"""Time a round and its parts without a data set; the options are in conf/bench.yaml."""

from tempera.commands.scripts import bench as main

if __name__ == "__main__":
    main()
