"""Starts the ranks' side of training, and refuses launches in which ranks do not see each other."""

import os

from accelerate import Accelerator

from data.config import Device, Precision
from data.errors import ConfigError
from train.config import PipelineConfig


def make_accelerator(config: PipelineConfig) -> Accelerator:
    """The accelerator of this rank.

    Raises:
        ConfigError: torchrun started several processes, but each believes that it is alone (they
            would all write the same checkpoint).
    """
    accelerator = Accelerator(
        mixed_precision="bf16" if config.run.precision is Precision.bf16 else "no",
        cpu=config.run.device is Device.cpu,
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world:
        raise ConfigError(
            f"WORLD_SIZE={world}",
            f"accelerate sees {accelerator.num_processes} process(es)",
            "on CPU start with ACCELERATE_USE_CPU=true torchrun --nproc-per-node N -m train.cli "
            "train ...",
        )
    return accelerator
