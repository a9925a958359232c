"""An extension of griffe: `__init__ = Options.__init__` in a class is shown as the method that it is."""

import copy
from typing import Any

import griffe


class SharedMethods(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _show(pkg)


def _show(owner: griffe.Module | griffe.Class) -> None:
    for member in list(owner.members.values()):
        if isinstance(member, griffe.Module | griffe.Class):
            _show(member)
        elif member.name == "__init__" and isinstance(member, griffe.Attribute):
            name, _, method = str(member.value).rpartition(".")
            if method == "__init__":
                options = owner.modules_collection[owner.resolve(name)]
                owner.set_member("__init__", copy.copy(options["__init__"]))
