"""lm-eval's command line with the model `unmask`: `python -m unmask.evaluation.harness --model unmask
--model_args pretrained=PATH ...`."""

import sys

from lm_eval.__main__ import cli_evaluate

from unmask.errors import UnmaskError

if __name__ == "__main__":
    try:
        cli_evaluate()
    except UnmaskError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
