"""Compare runs of eval/run.py; the options are in conf/report.yaml."""

from tempera.commands.scripts import report as main

if __name__ == "__main__":
    main()
