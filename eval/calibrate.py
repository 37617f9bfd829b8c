"""Measure a draft for schedule=calibrated; the options are in conf/calibrate.yaml."""

from tempera.commands.scripts import calibrate as main

if __name__ == "__main__":
    main()
