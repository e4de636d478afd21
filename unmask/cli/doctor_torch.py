"""What torch can use here: GPUs and kernels. This module runs in a process of its own, which prints each
finding as a line of JSON: a build of torch that does not fit the machine may end the process that imports it.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils import collect_env

from unmask.artifacts import num_cores, package_version
from unmask.cli.doctor import Finding, findings_of
from unmask.errors import first_line
from unmask.models.kernels import fused_linear
from unmask.models.kernels.log_softmax import can_compile

SDPA = ("flash", "mem_efficient", "cudnn", "math")
ON_GPUS = "used on GPUs only"


def build() -> Iterator[Finding]:
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    kind = next((f"{name} {version}" for name, version in versions.items() if version), "the CPU")
    yield Finding("torch", f"{torch.__version__}, built for {kind}")
    instructions = torch.backends.cpu.get_cpu_capability()
    meaning = f"{num_cores()} cores may be used here"
    if instructions in ("DEFAULT", "NO AVX"):
        meaning = "no vector instructions are used, which is slow. Is ATEN_CPU_CAPABILITY set?"
    yield Finding("torch on the CPU", f"{instructions}, {torch.get_num_threads()} threads", meaning)


def transformers() -> Iterator[Finding]:
    remedy = "Unmask builds on it:\npip install --upgrade unmask"
    yield imported("transformers", "transformers.modeling_utils", remedy, needed=True)


def imported(package: str, module: str, remedy: str, *, needed: bool = False) -> Finding:
    """Whether an installed package can be imported."""
    version = package_version(package)
    try:
        importlib.import_module(module)
    except Exception as error:  # user code: a damaged installation raises anything
        return Finding(package, f"{version} cannot be imported: {first_line(error)}", remedy, needed)
    return Finding(package, str(version), "can be imported")


def gpus() -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple", "not used: Unmask computes on CPUs and on GPUs that torch calls cuda")
    elif not count:
        yield Finding("GPU", "none that torch can use", why_no_gpu([str(each.message) for each in caught]))
    driver = collect_env.get_nvidia_driver_version(collect_env.run) if count else None
    for number in range(count):
        about = torch.cuda.get_device_properties(number)
        capability = f"compute capability {about.major}.{about.minor}"
        in_bfloat16 = torch.version.hip or about.major >= 8
        precision = "bfloat16" if in_bfloat16 else "no bfloat16: train in float16 (fp16) or float32"
        yield Finding(
            f"GPU {number}",
            f"{about.name}, {about.total_memory / 1e9:.1f} GB, {capability}",
            f"{precision}; driver {driver or 'unknown (no nvidia-smi)'}",
        )
        free, total = torch.cuda.mem_get_info(number)
        meaning = "other programs use it" if free < total / 2 else ""
        yield Finding(f"GPU {number}, memory", f"{free / 1e9:.1f} GB free", meaning)


def why_no_gpu(said: list[str]) -> str:
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


def attention() -> Iterator[Finding]:
    on = [name for name in SDPA if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    yield Finding("SDPA", ", ".join(on), "torch chooses among them")
    if not torch.cuda.is_available():
        yield Finding("FlexAttention", "not used", f"{ON_GPUS}; a CPU uses SDPA")
    else:
        remedy = "" if can_compile() else "it needs Triton, a C compiler and Python.h (below)"
        yield Finding("FlexAttention", "used", remedy)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        yield Finding("FlashAttention 2", "usable", "training.flash_attention=true turns it on")
    else:
        yield Finding("FlashAttention 2", "not usable", "needs a GPU from Ampere on, and 16 bits")
    version = package_version("flash-attn") or "not installed"
    yield Finding("flash-attn", version, "not needed: FlashAttention is torch's own build")


def compiled() -> Iterator[Finding]:
    version = package_version("triton") or "not installed"
    yield Finding("Triton", version, f"{ON_GPUS}, by compiled kernels; comes with torch's CUDA build")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = "there" if Path(sysconfig.get_path("include"), "Python.h").exists() else None
    cpp = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    for name, found, remedy in (
        ("C compiler", compiler, "compiled kernels need it:\napt-get install gcc"),
        ("Python.h", header, "compiled kernels need it:\napt-get install python3-dev"),
        ("C++ compiler", cpp, "torch_compile on a CPU needs it:\napt-get install g++"),
    ):
        yield Finding(name, found) if found else Finding(name, "missing", remedy)
    if torch.cuda.is_available() and can_compile():
        yield Finding("compiled kernels", "used")
    else:
        yield Finding("compiled kernels", "not used", "need a GPU, Triton, a C compiler and Python.h")


def liger() -> Iterator[Finding]:
    oldest = ".".join(map(str, fused_linear.MIN_VERSION))
    meaning = f"fused linear cross-entropy, {ON_GPUS}"
    if not fused_linear.installed():
        meaning += f"; from {oldest} on:\npip install 'liger-kernel>={oldest}'"
    yield Finding("liger-kernel", package_version("liger-kernel") or "not installed", meaning)


def bitsandbytes() -> Iterator[Finding]:
    """Last: its library for the GPU may end the process."""
    if package_version("bitsandbytes"):
        yield imported("bitsandbytes", "bitsandbytes", "pip install --upgrade bitsandbytes")
    else:
        purpose = "weights in 4 and 8 bits, 8-bit optimizers:\npip install 'unmask[cuda]'"
        yield Finding("bitsandbytes", "not installed", purpose)


if __name__ == "__main__":
    for probe in (build, transformers, gpus, attention, compiled, liger, bitsandbytes):
        for finding in findings_of(probe):
            print(json.dumps(asdict(finding)), flush=True)
