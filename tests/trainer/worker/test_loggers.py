"""What our libraries warn about in the worker is heard, whatever the script does with the logging module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.trainer.worker import loggers

PACKAGE = Path(loggers.__file__).parents[2]

DICT = """
logging.config.dictConfig({
    "version": 1,
    "handlers": {"mine": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "mine"}},
    "formatters": {"mine": {"format": "SCRIPT %(levelname)s %(name)s %(message)s"}},
    "root": {"level": "WARNING", "handlers": ["mine"]},
})
"""
FILE = """
logging.config.fileConfig(io.StringIO('''
[loggers]
keys=root
[handlers]
keys=mine
[formatters]
keys=mine
[logger_root]
level=WARNING
handlers=mine
[handler_mine]
class=StreamHandler
args=(sys.stdout,)
formatter=mine
[formatter_mine]
format=SCRIPT %(levelname)s %(name)s %(message)s
'''))
"""
SCRIPT = """
import io, logging, logging.config, sys
{before}
import dlrover.trainer.torch.flash_checkpoint.ddp, dlrover.trainer.torch.flash_checkpoint.fsdp
import dlrover.trainer.torch.flash_checkpoint.deepspeed, dlrover.trainer.torch.flash_checkpoint.megatron_sharded
import dlrover.trainer.torch.elastic.dataloader, dlrover.trainer.sharding_client, dlrover.compat.client.shared_objects
import dlrover.trainer.events, dlrover.trainer.sync, dlrover.compat.client.master_client
theirs = logging.getLogger("theirs")
{configure}
ours = [name for name in logging.root.manager.loggerDict if name.startswith(("dlrover.trainer", "dlrover.snapshot", "dlrover.compat.client"))]
for name in sorted(ours):
    logger = logging.getLogger(name)
    if isinstance(logger, logging.Logger) and "pytest" not in name:
        assert not logger.disabled, f"{{name}} is disabled: name it in dlrover.trainer.worker.loggers"
        logger.warning("heard")
        logger.info("not heard")
theirs.warning("not heard")
"""
OWN_CLASS = """
class Own(logging.Logger):
    def warning(self, msg, *args, **options):
        super().warning(f"own {msg}", *args, **options)
logging.setLoggerClass(Own)
"""


@pytest.mark.parametrize(("configure", "before"), [(DICT, ""), (FILE, ""), (DICT, OWN_CLASS)])
def test_a_script_that_configures_logging_does_not_silence_us(configure: str, before: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(configure=configure, before=before))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    word = "own heard" if before else "heard"
    assert f"SCRIPT WARNING dlrover.trainer.flash_checkpoint {word}" in done.stdout, (
        "by the script's handler and format"
    )
    assert f"SCRIPT WARNING dlrover.snapshot {word}" in done.stdout
    assert f"SCRIPT WARNING dlrover.compat.client.master_client {word}" in done.stdout
    assert "not heard" not in done.stdout, "the script's level counts for us, and its other loggers are its own affair"


def test_the_list_names_every_logger_that_our_modules_have_in_a_worker() -> None:
    """Also those of modules that need TensorFlow, which the script above cannot import."""
    found = set()
    for room in ("trainer", "snapshot", "compat/client"):
        for path in (PACKAGE / room).rglob("*.py"):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for own, name in re.findall(
                r"^_?log = logging\.getLogger\((?:(__name__)|\"(.+)\")\)", path.read_text(), re.M
            ):
                found.add(module if own else name)
    assert sorted(found) == sorted(loggers.NAMES)
