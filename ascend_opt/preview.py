"""What would become of passes in a vLLM process started from here; switches nothing on."""

from __future__ import annotations

import os

from ascend_opt import config as configuration
from ascend_opt import registry
from ascend_opt.config import ENVIRONMENT, Config, Request
from ascend_opt.controller import make_request
from ascend_opt.errors import NotApplicableError, ParameterError
from ascend_opt.slot import Slot
from ascend_opt.states import Explanation, State


def inherited() -> Config:
    """Return the configuration in this process's environment.

    Raises:
        ConfigError: It is wrong, and where.
    """
    value = os.environ.get(ENVIRONMENT, "")
    return configuration.from_environment(value, registry.discover().classes())


def explain(name: str, config: Config) -> tuple[Explanation, bool]:
    """Return what a pass would be under a configuration, and whether that asks for it.

    Raises:
        UnknownPassError: No such pass.
    """
    provided = registry.discover().get(name)
    asked = {request.name: request for request in config.requests}
    slot = Slot.prepare(provided, asked.get(name) or Request(name, provided.cls.Parameters()))
    if config.off:
        slot.refuse(State.OFF, f"{ENVIRONMENT}=off")
    return slot.explanation(slot, []), name in asked


def parse_enable(text: str) -> Request:
    """Read `PASS:key=value,key=value`; values are YAML scalars.

    Raises:
        ParameterError: It has another form, or the pass has no such parameter or value.
        UnknownPassError: No such pass.
    """
    import yaml

    name, _, rest = text.partition(":")
    parameters = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ParameterError(f"--enable {text}: found {item!r}, expected key=value")
        try:
            parameters[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            parameters[key.strip()] = value
    return make_request(registry.discover().get(name.strip()), parameters)


def require(requests: list[Request]) -> None:
    """Make sure that passes can be on in this installation.

    Raises:
        NotApplicableError: One cannot, and why.
    """
    for request in requests:
        slot = Slot.prepare(registry.discover().get(request.name), request)
        if not slot.usable:
            raise NotApplicableError(slot.verdict)
