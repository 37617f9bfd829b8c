"""As a script: train_draft/main.py for each row of options in a JSON file, one after the other;
torchrun starts several of it.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from tiny_targets import composed, script

if __name__ == "__main__":
    torch.set_num_threads(1)
    main = script("main")
    for options in json.loads(Path(sys.argv[1]).read_text()):
        AcceleratorState._reset_state()
        main(composed(*options, config="train_draft"))
