"""The argument parser of all commands."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that prints an error as one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
