"""A task of one's own. An hour, after lesson 3.

A task is a class with `reset` and `step`, and a few facts that others need (`envs.py::Task`;
`envs.py::PointOmni` is the shortest example, forty lines). Write one that is not there yet: a boat with
a rudder, a pendulum that swings, a bank account. It needs a descriptor of two numbers, a random start,
and a reward.

`make(config)` returns it. The check plays it: states keep their shapes, descriptors stay inside `low`
and `high`, rewards stay above `worst_reward`, the start is random, and a short search fills at least a
tenth of 32 cells.

Afterwards, register it (`envs.TASKS["boat-omni"] = Boat`) in a script that calls `cli.main()`, and take
it through the whole pipeline. A brax robot is three lines: try `swimmer-omni` with `--set
task.backend=generalized`.
"""

from envs import Task, TaskConfig


def make(config: TaskConfig) -> Task:
    raise NotImplementedError(
        "write a subclass of envs.Task and return one of `config.length` steps"
    )
