"""`python -m ascend_opt`."""

from ascend_opt.cli import main

main(prog_name="python -m ascend_opt")
