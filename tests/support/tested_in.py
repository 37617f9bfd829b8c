"""Which test files belong to a module: those of its name, or the one in the table."""

from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

TESTED_IN = {
    "config/test_conf.py": ("config/build", "config/cli", "config/instantiate"),
    "continuous/test_diffusion.py": ("continuous/noise",),
    "continuous/test_mar.py": ("continuous/loop", "continuous/rules", "continuous/target"),
    "data/test_prepare.py": ("data/encoders", "data/estimate", "data/shards", "data/sources"),
    "decoding/test_loop.py": ("decoding/interfaces", "drafters/none"),
    "decoding/test_tape.py": ("decoding/tape_calls",),
    "drafters/test_eagle.py": (
        "drafters/cache_slots",
        "drafters/hidden_state_draft",
        "targets/masks",
    ),
    "drafters/test_parallel.py": ("drafters/parallel_network",),
    "drafters/test_eagle_network.py": (
        "drafters/draft_network",
        "drafters/eagle_fused",
        "runtime/network_directory",
    ),
    "evaluation/test_benchmark.py": ("commands/bench",),
    "evaluation/test_calibration.py": ("commands/calibrate",),
    "evaluation/test_length_search.py": ("commands/expected_length",),
    "evaluation/test_latency.py": ("evaluation/pipeline",),
    "evaluation/test_tuning.py": ("commands/tune",),
    "evaluation/test_run.py": ("evaluation/generate",),
    "exactness/test_gaussians.py": ("continuous/residual_sampler",),
    "integration/test_dry_run.py": (
        "commands/costs",
        "evaluation/estimate",
        "runtime/cost",
        "runtime/rehearsal",
        "runtime/units",
        "training/estimate",
        "training/split_rehearsal",
    ),
    "integration/test_eval_script.py": ("commands/evaluate", "commands/scripts"),
    "integration/test_model_families.py": (
        "image_tokenizers/pretrained",
        "targets/emu3",
        "targets/shared_vocabulary",
        "training/fsdp",
    ),
    "integration/test_training_scripts.py": (
        "commands/prepare",
        "commands/sources",
        "commands/train",
    ),
    "metrics/test_clip.py": (
        "metrics/aesthetic",
        "metrics/clip_model",
        "metrics/hps",
        "metrics/linear_chain",
        "metrics/pick_score",
    ),
    "metrics/test_geneval.py": (
        "metrics/colour_namer",
        "metrics/detector",
        "metrics/geneval_tasks",
    ),
    "metrics/test_image_reward.py": ("metrics/blip",),
    "metrics/test_inception.py": ("metrics/vgg", "metrics/vgg_layers"),
    "metrics/test_standard.py": ("metrics/reference", "metrics/weights"),
    "metrics/test_evaluators.py": ("shapes/classifier", "shapes/clip", "shapes/evaluator"),
    "reporting/test_paper_tables.py": ("reporting/sweep_callback",),
    "reporting/test_report.py": (
        "commands/report",
        "reporting/baseline",
        "reporting/collect",
        "reporting/console",
        "reporting/figures",
        "reporting/pareto",
        "reporting/run_names",
        "reporting/wandb_report",
        "runtime/image_files",
    ),
    "reporting/test_report_page.py": ("reporting/page_pictures",),
    "runtime/test_row_store.py": ("evaluation/run_directory",),
    "shapes/test_build.py": (
        "commands/build_shapes",
        "shapes/build/broken",
        "shapes/build/evaluators",
        "shapes/build/looks",
        "shapes/build/record",
        "shapes/build/resumable",
        "shapes/build/sampling",
        "shapes/build/stages",
        "shapes/build/target",
        "shapes/build/tokenizer",
        "shapes/networks",
    ),
    "shapes/test_mar.py": (
        "image_tokenizers/kl",
        "shapes/build/kl",
        "shapes/build/mar",
        "shapes/build/mar_draft",
        "shapes/build/single_shapes",
        "shapes/labels",
    ),
    "targets/test_chameleon.py": ("targets/rotary",),
    "targets/test_token_format.py": ("image_tokenizers/line_ends",),
    "targets/test_transformer.py": ("runtime/network_identity", "targets/network"),
    "training/test_teacher_forcing.py": ("training/validation",),
    "training/test_trainer.py": ("training/checkpoint",),
}
"""Modules without a test file of their name, by the file that tests them."""


def test_files(module: str) -> Iterator[str]:
    """The test files of a module such as `decoding/loop`, below tests/."""
    tests, place = ROOT / "tests", Path(module)
    named = [f"test_{place.name}.py", f"test_{place.name}_*.py"]
    for path in (path for name in named for path in sorted((tests / place.parent).glob(name))):
        yield str(path.relative_to(tests))
    yield from (file for file, modules in TESTED_IN.items() if module in modules)
