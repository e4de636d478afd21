"""Environment variables: which of them are settings of a run, and which are none."""

from __future__ import annotations

import re

ACCEPT_UNSANDBOXED = "UNMASK_ACCEPT_UNSANDBOXED_CODE"
"""With the value 1, model-written programs run even if nothing isolates them; --i-accept-unsandboxed-code
sets it."""
API_KEY = "UNMASK_API_KEY"
"""The key that `unmask serve` requires and rollouts send; not a setting, so that it is not recorded."""
ADMIN_KEY = "UNMASK_ADMIN_KEY"
"""The key of those who may replace the weights of `unmask serve`; not a setting either."""
# the command line's tracebacks, the tests' data
NOT_SETTINGS = {"UNMASK_DEBUG", "UNMASK_SHARED", ACCEPT_UNSANDBOXED, API_KEY, ADMIN_KEY}
SETTING = re.compile(rf"(?!({'|'.join(sorted(NOT_SETTINGS))})$)(UNMASK|DIFFU|GRPO)_\w+|VLLM_SERVER_HOST")
"""The names of variables that are settings of a run, and are recorded."""
