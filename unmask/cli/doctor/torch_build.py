"""What torch can use here: GPUs and kernels. This module runs in a process of its own, which prints each
finding as a line of JSON: a build of torch that does not fit the machine may end the process that imports it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from unmask.artifacts import num_cores, package_version
from unmask.cli.doctor.findings import Finding, findings_of
from unmask.errors import first_line
from unmask.models.kernels import fused_linear
from unmask.models.kernels.log_softmax import can_compile

SDPA = ("flash", "mem_efficient", "cudnn", "math")
SMI = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
ON_GPUS = "used on GPUs only"


def build() -> Iterator[Finding]:
    kind = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "the CPU"
    )
    yield Finding("torch", f"{torch.__version__}, built for {kind}")
    instructions = torch.backends.cpu.get_cpu_capability()
    slow = instructions in ("DEFAULT", "NO AVX")
    remedy = "no vector instructions are used, which is slow. Is ATEN_CPU_CAPABILITY set?" if slow else ""
    yield Finding(
        "torch on the CPU",
        f"{instructions}, {torch.get_num_threads()} threads",
        remedy or f"{num_cores()} cores may be used here",
    )


def transformers() -> Iterator[Finding]:
    version = package_version("transformers")
    try:
        importlib.import_module("transformers.modeling_utils")
    except Exception as error:  # user code: a damaged installation raises anything
        remedy = "Unmask builds on it:\npip install --upgrade unmask"
        yield Finding(
            "transformers", f"{version} cannot be imported: {first_line(error)}", remedy, broken=True
        )
        return
    yield Finding("transformers", str(version), "can be imported")


def gpus() -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple", "not used: Unmask computes on CPUs and on GPUs that torch calls cuda")
    elif not count:
        yield Finding("GPU", "none that torch can use", _why_no_gpu([str(each.message) for each in caught]))
    driver = _driver() if count else ""
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        found = (
            f"{about.name}, {about.total_memory / 1e9:.1f} GB, compute capability {about.major}.{about.minor}"
        )
        bfloat16 = (
            "bfloat16"
            if torch.version.hip or about.major >= 8
            else "no bfloat16: train in float16 (fp16) or float32"
        )
        yield Finding(f"GPU {number}", found, f"{bfloat16}; driver {driver}")
        free, total = torch.cuda.mem_get_info(number)
        yield Finding(
            f"GPU {number}, memory",
            f"{free / 1e9:.1f} GB free",
            "other programs use it" if free < total / 2 else "",
        )


def _why_no_gpu(said: list[str]) -> str:
    """The reason, if the machine has one all the same. `said` are torch's warnings."""
    if said:
        return f"torch says: {said[0].splitlines()[0]}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all: unset it"
    if not shutil.which("nvidia-smi"):
        return "training and generation run on the CPU"
    if torch.version.cuda is None:
        return (
            "this machine has nvidia-smi, but torch is built without CUDA: install the build that "
            "pytorch.org names for it"
        )
    return (
        "this machine has nvidia-smi: does it list the GPU, and may this user or container open /dev/nvidia*?"
    )


def _driver() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, timeout=20, check=True).stdout.partition(
            "\n"
        )[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown (no nvidia-smi)"


def attention() -> Iterator[Finding]:
    on = [name for name in SDPA if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    yield Finding("SDPA", ", ".join(on), "torch chooses among them")
    gpu = torch.cuda.is_available()
    remedy = "" if can_compile() else "it needs Triton, a C compiler and Python.h (below)"
    yield Finding(
        "FlexAttention", "used" if gpu else "not used", remedy if gpu else f"{ON_GPUS}; a CPU uses SDPA"
    )
    flash = gpu and torch.cuda.get_device_capability() >= (8, 0)
    remedy = (
        "training.flash_attention=true turns it on" if flash else "needs a GPU from Ampere on, and 16 bits"
    )
    yield Finding("FlashAttention 2", "usable" if flash else "not usable", remedy)
    yield Finding(
        "flash-attn",
        package_version("flash-attn") or "not installed",
        "not needed: FlashAttention is torch's own build",
    )


def compiled() -> Iterator[Finding]:
    yield Finding(
        "Triton",
        package_version("triton") or "not installed",
        f"{ON_GPUS}, by compiled kernels; comes with torch's CUDA build",
    )
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    yield Finding(
        "C compiler",
        compiler or "missing",
        "" if compiler else "compiled kernels need it:\napt-get install gcc",
    )
    header = Path(sysconfig.get_path("include"), "Python.h").exists()
    yield Finding(
        "Python.h",
        "there" if header else "missing",
        "" if header else "compiled kernels need it:\napt-get install python3-dev",
    )
    cpp = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    yield Finding(
        "C++ compiler",
        cpp or "missing",
        "" if cpp else "torch_compile on a CPU needs it:\napt-get install g++",
    )
    used = torch.cuda.is_available() and can_compile()
    yield Finding(
        "compiled kernels",
        "used" if used else "not used",
        "" if used else "need a GPU, Triton, a C compiler and Python.h",
    )


def liger() -> Iterator[Finding]:
    version = package_version("liger-kernel")
    oldest = ".".join(map(str, fused_linear.MIN_VERSION))
    meaning = f"fused linear cross-entropy, {ON_GPUS}"
    if not fused_linear.installed():
        meaning += f"; from {oldest} on:\npip install 'liger-kernel>={oldest}'"
    yield Finding("liger-kernel", version or "not installed", meaning)


def bitsandbytes() -> Iterator[Finding]:
    """Last: its library for the GPU may end the process."""
    version = package_version("bitsandbytes")
    if version is None:
        yield Finding(
            "bitsandbytes",
            "not installed",
            "weights in 4 and 8 bits, 8-bit optimizers:\npip install 'unmask[cuda]'",
        )
        return
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:  # user code: a damaged installation raises anything
        yield Finding(
            "bitsandbytes",
            f"{version} cannot be imported: {first_line(error)}",
            "pip install --upgrade bitsandbytes",
        )
        return
    yield Finding("bitsandbytes", version, "can be imported")


if __name__ == "__main__":
    for probe in (build, transformers, gpus, attention, compiled, liger, bitsandbytes):
        for finding in findings_of(probe.__name__, probe):
            print(json.dumps(vars(finding)), flush=True)
