"""Importing this module disables transformers' ways to run code of a model folder or to access a hub. A folder can name
Python files (`auto_map` in any of its files), and transformers asks at the terminal whether to run them. Here both the
question and the import of such files are replaced by a refusal. Import this module before any model is loaded."""

import logging
import os
import sys
from typing import Any

from shoal.errors import ModelError

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "USE_HUB_KERNELS": "0"}
os.environ.update(OFFLINE)  # the libraries read these when they are imported

import huggingface_hub.constants  # noqa: E402

IMPORTERS = ("get_class_from_dynamic_module", "get_class_in_module", "get_cached_module_file")


def refuse_code(*_arguments: Any, **_options: Any) -> Any:
    raise ModelError("this model brings Python code of its own, and shoal runs no code of a model folder or a policy")


def trust_nothing(_trusted: Any, _name: Any, has_local_code: bool, has_remote_code: bool, *_: Any, **__: Any) -> bool:
    """Replaces `resolve_trust_remote_code`, which would ask: transformers' own class, or none."""
    return bool(refuse_code()) if has_remote_code and not has_local_code else False


def refuse_kernel(*_arguments: Any, **_options: Any) -> Any:
    raise ImportError("shoal loads no kernels from a hub")  # as if the package for it were not installed


def lock() -> None:
    """Replace the functions where they are defined, and in every module that has already imported them by name."""
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # it may have been imported before this module
    refusals = dict.fromkeys(IMPORTERS, refuse_code)
    refusals |= {"resolve_trust_remote_code": trust_nothing, "get_kernel": refuse_kernel}
    for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "transformers"]:
        for name in refusals.keys() & vars(module).keys():
            setattr(module, name, refusals[name])
    library = logging.getLogger("transformers")  # its messages may quote a policy's files: our log cleans them
    library.handlers.clear()
    library.propagate = True


lock()
