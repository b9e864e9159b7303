"""Make the calls on device memory that programs make, and check what each has done: `python -m tests.fakes.cuda.zoo`.

Each call has a case: what it needs, its arguments, and what must be true afterwards. Functions of the driver are looked
up as libcudart does it, by cuGetProcAddress. Asked on the standard input, a line each, and answered by a line:
    cases               the names of all cases; the first word of each is the function that it calls
    prepare NAME, ...   gets what these need, on as many streams
    call                has each called, in a thread of its own; answers when all are about to
    answers             reports which have returned by now, as NAME=CODE, ...
    check               reports "right", or which case is not
    loop COUNT          runs random cases in COUNT threads, from then on
    count               reports how many cases the threads have run
    stop                lets the threads end; reports the same
A case of the threads that fails, or is not right, ends the program with a line that says so.
The modules copies, allocations and graphs hold the cases. A test workload.
"""

from tests.fakes.cuda.zoo import allocations, copies, graphs
from tests.fakes.cuda.zoo.visit import VERSION, cases

__all__ = ["VERSION", "allocations", "cases", "copies", "graphs"]
