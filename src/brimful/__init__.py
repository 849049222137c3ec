"""Brimful forecasts and plans the GPU memory of training a language model.

Importing it is cheap: torch and transformers are imported only when a forecast is asked for.

    from brimful import RunFile
    from brimful.forecast import forecast

    result, tape = forecast(RunFile(model="mistral-7b-v0.3", method="lora"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brimful.core.errors import BrimfulError
    from brimful.core.forecast import Forecast
    from brimful.core.runfile import RunFile

__version__ = "0.1.0"

__all__ = ["BrimfulError", "Forecast", "RunFile", "__version__"]

_HOMES = {
    "BrimfulError": "brimful.core.errors",
    "Forecast": "brimful.core.forecast",
    "RunFile": "brimful.core.runfile",
}


def __getattr__(name: str) -> Any:
    # `forecast` is the subpackage; the function of that name lives in it
    if name == "forecast":
        return import_module("brimful.forecast")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'brimful' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
