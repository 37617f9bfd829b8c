"""Measure a draft for schedule=calibrated and optimal; the options are in conf/calibrate.yaml."""

from tempera.commands.scripts import calibrate as main

if __name__ == "__main__":
    main()
