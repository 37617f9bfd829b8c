"""Check a GPU without downloads; the options are in conf/gpu_check.yaml."""

from tempera.commands.scripts import gpu_check as main

if __name__ == "__main__":
    main()
