"""Builds a wheel whose only top-level name is `jspec`; everything else about the package is in pyproject.toml.

The folders `convert` and `pallas_kernels` lie beside `jspec` in the sources. In the wheel they are `jspec._convert` and
`jspec._kernels`, so that they hide no other package of these names, and all import statements have the new names. An
editable installation leaves folders and names as they are.
"""

import ast
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

INSTALLED = {
    "convert": "jspec._convert",
    "pallas_kernels": "jspec._kernels",
}  # name in the wheel by that in the sources


class BuildOnePackage(build_py):
    """Copies the modules to where the wheel has them, and changes their imports."""

    def run(self):
        if not self.editable_mode:
            self.packages = [_renamed(package) for package in self.packages]
            self.package_dir = {**self.package_dir, **{name: folder for folder, name in INSTALLED.items()}}
            self.__dict__.pop("data_files", None)  # was computed from the names in the sources, if it was
        super().run()

    def build_module(self, module, module_file, package):
        path, is_copied = super().build_module(module, module_file, package)
        if not self.editable_mode:
            Path(path).write_text(with_installed_names(Path(path).read_text("utf-8")), "utf-8")
        return path, is_copied


class NameOnePackage(egg_info):
    """States the top-level name in the metadata."""

    def run(self):
        super().run()
        Path(self.egg_info, "top_level.txt").write_text("jspec\n")


def with_installed_names(source):
    """Return a module's source with imports of the names that the wheel has.

    Raises:
        ValueError: an import has a form that cannot be renamed: `import convert` also binds the old name.
    """
    changed = re.sub(
        r"^(\s*from )([\w.]+)(?= import )", lambda match: match[1] + _renamed(match[2]), source, flags=re.M
    )
    imports = [node for node in ast.walk(ast.parse(changed)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in imports:
        names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if old := [name for name in names if _renamed(name) != name]:
            raise ValueError(f"expected `from {old[0]} import ...`, got `{ast.unparse(node)}` in line {node.lineno}")
    return changed


def _renamed(module):
    top, dot, rest = module.partition(".")
    return INSTALLED.get(top, top) + dot + rest


setup(cmdclass={"build_py": BuildOnePackage, "egg_info": NameOnePackage})
