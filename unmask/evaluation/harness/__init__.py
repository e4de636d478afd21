"""Evaluation by lm-evaluation-harness (lm-eval), unmodified: Unmask's models are the model `unmask` of its
registry.

lm-eval looks for no plugins: a model is registered by importing its module. Importing this one registers it,
beside lm-eval's own models:

    import lm_eval, unmask.evaluation.harness
    lm_eval.simple_evaluate(model="unmask", model_args="pretrained=PATH,samples=128", tasks=[...])
    lm_eval.simple_evaluate(model=unmask.evaluation.harness.HarnessLM(lm), tasks=[...])

`python -m unmask.evaluation.harness` is the command `lm_eval` with the model registered.
"""

from unmask.errors import require

require("lm_eval", "eval", where="lm-eval")

# registers lm-eval's own models, which it does only while its registry is empty
from lm_eval import models  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402

from unmask.evaluation.harness.model import HarnessLM  # noqa: E402
from unmask.evaluation.harness.run import check_tasks, evaluate_with_harness  # noqa: E402

__all__ = ["HarnessLM", "check_tasks", "evaluate_with_harness", "models"]

register_model("unmask")(HarnessLM)
