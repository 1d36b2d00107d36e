"""Starts the ranks' side of training, and refuses launches in which ranks do not see each other."""

import os

import torch
from accelerate import Accelerator

from data.config import Device, Precision
from data.errors import ConfigError
from train.config import PipelineConfig


def compute_device(config: PipelineConfig) -> torch.device:
    """Where to compute.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    cuda = torch.cuda.is_available()
    if config.run.device is Device.cuda and not cuda:
        raise ConfigError("run.device=cuda", "there is no CUDA device", "run.device=cpu")
    if config.run.device is Device.cpu or not cuda:
        return torch.device("cpu")
    # Each of several builders or ranks of one machine takes a device of its own.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def make_accelerator(config: PipelineConfig) -> Accelerator:
    """The accelerator of this rank.

    Raises:
        ConfigError: several processes were started, but each believes that it is alone (they
            would all write the same checkpoint).
    """
    on_cpu = compute_device(config).type == "cpu"
    bf16 = config.run.precision is Precision.bf16
    if bf16 and not on_cpu and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            "run.precision=bf16", "this GPU does not compute in bf16", "run.precision=fp32"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fix = "start with 'torchrun --nproc-per-node N -m train.cli train ...'"
    try:
        accelerator = Accelerator(
            mixed_precision="bf16" if bf16 else "no",
            # Said outright: without it torchrun's ranks on a CPU machine do not see each other.
            cpu=on_cpu,
        )
    except ValueError as error:
        raise ConfigError(f"WORLD_SIZE={world}", str(error), fix) from error
    if accelerator.num_processes != world:
        found = f"accelerate sees {accelerator.num_processes} process(es)"
        raise ConfigError(f"WORLD_SIZE={world}", found, fix)
    return accelerator
