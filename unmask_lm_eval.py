"""Makes the model `unmask` known to lm-eval's own command line, which looks for no plugins.

PyTorch calls `register` at the end of its import (entry point `torch.backends`), and `lm_eval` imports
PyTorch before it looks a model up. This module is outside the package `unmask`, which other programs need not
import.
"""

import sys
from importlib import import_module


def register() -> None:
    """Add the model `unmask` to lm-eval's registry, if the program uses lm-eval."""
    if "lm_eval" not in sys.modules:
        return
    try:
        import_module("lm_eval.models")  # lm-eval registers its own only while its registry is empty
        registry = import_module("lm_eval.api.registry").model_registry
    except (ImportError, AttributeError):
        return  # another version, or a file of that name: an error here would be one of `import torch`
    registry.register("unmask", target="unmask.evaluation.harness.model:HarnessLM")
