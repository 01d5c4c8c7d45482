"""What the tables say."""

import pytest

from ascend_opt import PassStatus, State, render
from ascend_opt.reporting import Process, Record


@pytest.mark.parametrize(
    ("rank", "replica", "shown"), [(None, None, "-"), (1, 0, "1"), (0, 1, "1:0")]
)
def test_a_rank_names_its_engine_where_there_are_several(rank, replica, shown):
    """Workers of two data-parallel engines have the same rank, and are told apart."""
    process = Process(7, 1, 1, "VllmWorker-0", rank, replica)
    table = render.records([Record(process, 1.0, (PassStatus("p", State.OFF, "why"),))])
    assert [str(cell) for cell in table.columns[2].cells] == [shown]
