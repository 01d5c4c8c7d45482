"""``python -m ascend_opt.simnpu``: see :mod:`ascend_opt.simnpu.cli`."""

from ascend_opt.simnpu.cli import simnpu

simnpu(prog_name="python -m ascend_opt.simnpu")
