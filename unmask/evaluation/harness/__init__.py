"""Evaluation by lm-evaluation-harness (lm-eval), unmodified: Unmask's models are the model `unmask` of its
registry.

The command `lm_eval` knows it where Unmask is installed. Python programs import this module:

    import lm_eval, unmask.evaluation.harness
    lm_eval.simple_evaluate(model="unmask", model_args="pretrained=PATH,samples=128", tasks=[...])
    lm_eval.simple_evaluate(model=unmask.evaluation.harness.HarnessLM(lm), tasks=[...])
"""

from unmask.errors import require
from unmask_lm_eval import register

for library in ("lm_eval", "accelerate"):
    require(library, where="lm-eval")

from unmask.evaluation.harness.model import HarnessLM  # noqa: E402
from unmask.evaluation.harness.run import check_tasks, evaluate_with_harness  # noqa: E402

__all__ = ["HarnessLM", "check_tasks", "evaluate_with_harness"]

register()
