"""lm-eval's command line with the model `unmask`: `python -m unmask.evaluation.harness --model unmask --model_args pretrained=PATH ...`."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
