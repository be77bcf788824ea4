"""What pyproject.toml cannot say: native code (steps of CPUs, sources of drafts) is compiled where that can be."""

import platform
import sys
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Loaded through ctypes, so it is no module and needs nothing of Python's headers. The instructions that it uses are
# chosen inside the file and asked for when it is loaded: one wheel runs on any x86-64.
step = Extension(
    "engine.cpu._step",
    ["engine/cpu/step.cpp"],
    depends=sorted(glob("engine/cpu/*.h")),
    language="c++",
    # No fused products where the file does not ask for them: a compiler fuses one copy of a function and not another,
    # and a token's sums would depend on its place in a step.
    extra_compile_args=[
        "-ffp-contract=off",
        "-std=c++17",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-pthread",
        "-Wno-psabi",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ],
    extra_link_args=["-pthread"],
    optional=True,  # without a compiler the install goes on, and torch computes steps
)
# Loaded through ctypes as well; what answers are guessed to say next, for any processor.
guesses = Extension(
    "engine.speculation._guesses",
    ["engine/speculation/guesses.cpp"],
    depends=sorted(glob("engine/speculation/*.h")),
    language="c++",
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"],
    optional=True,  # without a compiler Python guesses
)


class Build(build_ext):
    """An assembler may not know tiles of matrices (AMX) though its compiler does: steps do without them then."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one."""
        try:
            super().build_extension(ext)
        except CompileError:
            if ext is not step:
                raise
            ext.define_macros.append(("HAS_TILES", "0"))
            super().build_extension(ext)


is_for_it = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
setup(
    ext_modules=[guesses, step] if is_for_it else [guesses] if sys.platform != "win32" else [],
    cmdclass={"build_ext": Build},
)
