"""The command line in processes that pass for GPUs, across which alone accelerate shards: torchrun ...
as_gpus.py VERB ..."""

import sys
from typing import Any

from tests.training.sharded import pass_for_gpus
from unmask.cli import main, run

training_arguments = run.training_arguments


def on_gpus(*arguments: Any) -> Any:
    made = training_arguments(*arguments)
    pass_for_gpus()
    return made


if __name__ == "__main__":
    run.training_arguments = on_gpus
    sys.orig_argv = ["python", "-m", "unmask", *sys.argv[1:]]
    main()
