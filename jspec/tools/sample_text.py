"""A text to measure drafters on where the user gives none: English prose, then Python."""

TEXT = '''\
The lock keeper's house stands where the canal leaves the river, on a strip of ground so narrow that the garden is a \
single row of beans. In summer the boats begin to arrive before seven. Each one waits below the gates until the water \
in the chamber has fallen to its own level; then the gates open, the boat slides in, and the ropes are thrown over the \
iron posts. Filling the chamber takes eleven minutes. The keeper has counted them for thirty years and says that the \
last one is always the longest, because the boat has stopped rising and nobody can see why the gates stay shut.

Most people ask him the same questions. How deep is it? How old are the gates? Does anyone ever fall in? He answers \
that it is deeper than it looks, that the gates are younger than he is, and that people fall in less often than dogs. \
In winter, when the canal is closed, he oils the gears, paints the railings and writes down the height of the river \
every morning in a green book. The book is the only record of the great flood that gives the hour at which it began.

A good plan says what will be done, who will do it and how we shall know that it is finished. It is short enough to be \
read by those who have to follow it. When the plan turns out to be wrong, change the plan first and the work second, \
so that the two never tell different stories.

class Gate:
    """A gate between two levels of water."""

    def __init__(self, name, upper, lower):
        self.name = name
        self.upper = upper
        self.lower = lower
        self.is_open = False

    def difference(self):
        """Return the height of the water behind the gate."""
        return self.upper - self.lower

    def open(self):
        if self.difference() != 0:
            raise ValueError("the water must be level before %s is opened" % self.name)
        self.is_open = True

    def close(self):
        self.is_open = False


def fill(gate, step=1):
    """Let water in until both sides are level, and return the number of steps."""
    count = 0
    while gate.lower < gate.upper:
        gate.lower = min(gate.lower + step, gate.upper)
        count += 1
    return count


def main():
    gate = Gate("north", upper=12, lower=4)
    print("filled in", fill(gate, step=2), "steps")
    gate.open()
    for name in sorted(vars(gate)):
        print(name, "=", getattr(gate, name))


if __name__ == "__main__":
    main()
'''
