"""The command ``dspark VERB key=value ...``: composes the configuration and calls the verb.

The only module that knows Hydra. Torch is imported inside the verbs, after the threads are
configured, and ``--help`` never imports it.
"""

import difflib
import logging
import os
import sys
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.errors import ConfigError, UserError
from data.machine import configure_process
from data.progress import is_main_rank
from train.config import VERBS, PipelineConfig
from train.help import known_keys, verb_help, verbs_help
from train.rules import load_config

USER_ERROR = 2


def main() -> None:
    """Entry point of ``dspark``."""
    configure_process()
    arguments = sys.argv[1:]
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help"):
        sys.stdout.write(verbs_help())
        return
    if verb not in VERBS:
        sys.exit(f"dspark: unknown verb '{verb}'; verbs: {', '.join(VERBS)} (see dspark --help)")
    if any(a in ("-h", "--help") for a in arguments):
        sys.stdout.write(verb_help(verb))
        return
    level = logging.INFO if is_main_rank() else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        run_verb(verb, arguments[1:])
    except UserError as error:
        fail(verb, error)


def fail(verb: str, error: UserError) -> NoReturn:
    """Ends the process with the message alone: a user's mistake needs no traceback."""
    sys.stderr.write(f"dspark {verb}: {error}\n")
    sys.exit(USER_ERROR)


def run_verb(verb: str, overrides: list[str]) -> None:
    """Composes the verb's configuration with Hydra and runs it.

    Raises:
        ConfigError: a key, value or group that does not exist or has no effect on this verb.
    """
    for override in overrides:
        require_effect(verb, override)
    ConfigStore.instance().store(name="schema", node=PipelineConfig)

    @hydra.main(version_base="1.3", config_path="pkg://configs", config_name=verb)
    def application(cfg: DictConfig) -> None:
        try:
            config = load_config(cfg, verb)
            from train.verbs import RUN  # imports torch

            RUN[verb](config)
        except UserError as error:  # Hydra would print lines of its own before it goes on
            fail(verb, error)

    # Hydra reads sys.argv, and would print its own errors and end the process.
    sys.argv = [f"dspark {verb}", *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        application()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides) from error


def require_effect(verb: str, override: str) -> None:
    """Refuses to override a group that the verb never reads.

    Raises:
        ConfigError: names the groups that it does read.
    """
    if override.startswith("-"):
        return
    path = override.lstrip("+~").split("=", 1)[0].split("@")[0]
    path = path.replace("/", ".").split("[")[0]
    spec, known = VERBS[verb], known_keys()
    groups = {key.split(".")[0] for key in known}
    if (path in known or path in groups) and not spec.reads_key(path):
        raise ConfigError(
            override,
            f"has no effect on 'dspark {verb}'",
            f"leave it out; 'dspark {verb} --help' lists what it reads",
        )


def explain(error: Exception, overrides: list[str]) -> ConfigError:
    """One message from Hydra's chain of errors: the key, what is wrong, and the fix."""
    if isinstance(error, MissingConfigException):
        options = ", ".join(error.options or [])
        return ConfigError(str(error.missing_cfg_file), "no such preset", f"there are: {options}")
    if isinstance(error, OverrideParseException):
        return ConfigError(error.override, str(error).split("\n")[0], "write key=value")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    given = next((o for o in overrides if o.split("=")[0].lstrip("+~") in str(error)), "")
    key = str(getattr(cause, "full_key", None) or given.split("=")[0].lstrip("+~"))
    key = key.split("[")[0]
    known = known_keys()
    if key in known:
        return ConfigError(given or key, str(cause).split("\n")[0], f"{key} is {known[key]}")
    close = difflib.get_close_matches(key, known, n=3)
    fix = f"did you mean {' or '.join(close)}?" if close else "'--help' lists all keys"
    return ConfigError(key, "unknown key" if close else str(cause).split("\n")[0], fix)


if __name__ == "__main__":
    main()
