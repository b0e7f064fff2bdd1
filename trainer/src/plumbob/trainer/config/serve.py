"""Every setting of `serve`. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plumbob.trainer.config.options import THE_RUN, check_values, option, require
from plumbob.trainer.config.rollout_options import ChatOptions


@dataclass(frozen=True)
class ServeConfig(ChatOptions):
    """Settings of a server. Example: `ServeConfig(model="tiny", port=0)`."""

    model: str = option("tiny", "-m", group=THE_RUN)
    """Model with a chat template: a folder, a Hugging Face hub name, or a bundled model such as tiny."""
    host: str = option("127.0.0.1")
    """Address to listen on; 0.0.0.0 accepts requests from other machines."""
    port: int = option(8000, at_least=0, at_most=65535)
    """Port to listen on; 0 picks a free one."""
    max_concurrent: int = option(64, at_least=1)
    """Maximum number of completions sampled at the same time; further ones wait."""
    max_context: int | None = option(None, at_least=2)
    """Maximum number of tokens of a prompt and its completion together. Default: 4096, or the model's maximum if that
    is smaller."""
    bf16: bool = option(False)
    """Generate in bfloat16."""
    allow_host: tuple[str, ...] = option(())
    """Host name under which clients may ask for this server, besides localhost, IP addresses and --host, and whose web pages
    may use it; may be repeated; '*' for any."""

    def __post_init__(self) -> None:
        check_values(self)
        plain = re.fullmatch(r"[\w.:%-]+", self.host) is not None
        require(plain, f"--host takes an address or a host name, without scheme, port and path, so not {self.host!r}")
        for name in self.allow_host:
            plain = re.fullmatch(r"\*|[\w.-]+", name) is not None
            require(plain, f"--allow-host takes a host name such as gpu-box, without scheme and port, so not {name!r}")
