"""Generate images, and measure acceptance, speed and quality; the options are in conf/eval.yaml."""

from tempera.commands.scripts import evaluate as main

if __name__ == "__main__":
    main()
