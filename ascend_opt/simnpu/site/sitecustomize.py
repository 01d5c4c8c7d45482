"""Found by Python at start-up, because simnpu's launcher puts this directory on PYTHONPATH."""

import os
import sys

if os.environ.get("SIMNPU") == "1":
    from ascend_opt.simnpu import importing

    importing.arm()

# There is one sitecustomize to a process: the one that this one hides still has its turn.
_here = os.path.dirname(os.path.abspath(__file__))
_rest = [p for p in sys.path if os.path.abspath(p or ".") != _here]
for _path in _rest:
    _hidden = os.path.join(_path, "sitecustomize.py")
    if os.path.isfile(_hidden):
        with open(_hidden) as _file:
            exec(compile(_file.read(), _hidden, "exec"))
        break
