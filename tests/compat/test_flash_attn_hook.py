"""The import hook: nothing before it is asked for, everything after, nothing left behind.

Each case runs in a process of its own, as a program would, since imports are kept.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

if any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface", "vllm_flash_attn")):
    pytest.skip("a FlashAttention is installed here", allow_module_level=True)


ROOT = Path(__file__).resolve().parents[2]


def run(code: str, folder: Path = ROOT) -> None:
    code = "import pagetile.compat.flash_attn as shim\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


REFUSES = """
def refuses(name):
    try:
        __import__(name)
    except ImportError:
        return True
    return False
"""


def test_the_names_come_and_go() -> None:
    run(
        REFUSES
        + """
assert refuses("flash_attn") and refuses("flash_attn_interface")
shim.install()
from flash_attn import __version__, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_func as same
from flash_attn_interface import flash_attn_with_kvcache as three, get_scheduler_metadata
import flash_attn, importlib.util
assert flash_attn.bert_padding.pad_input is pad_input
assert flash_attn_func is same is shim.flash_attn_func
assert three is not flash_attn_with_kvcache
assert tuple(map(int, __version__.split(".")[:2])) >= (2, 8)
assert importlib.util.find_spec("flash_attn") is not None
assert not hasattr(flash_attn, "torch") and not hasattr(flash_attn, "install")
assert refuses("flash_attn.layers"), "what is not there is not there"
assert refuses("vllm_flash_attn") and refuses("sgl_kernel"), "they were not asked for"
shim.install()                        # again: nothing happens
shim.install("vllm_flash_attn", "sgl_kernel")
from vllm_flash_attn import flash_attn_varlen_func as fork
from vllm_flash_attn.flash_attn_interface import get_scheduler_metadata
from sgl_kernel.flash_attn import flash_attn_with_kvcache as sgl
assert fork is not flash_attn_varlen_func and sgl is three
shim.uninstall()
assert refuses("flash_attn") and refuses("flash_attn.bert_padding") and refuses("sgl_kernel.flash_attn")
shim.uninstall()                      # again: nothing happens
"""
    )


def test_a_package_that_is_imported_is_not_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "flash_attn.py").write_text("theirs = True\n")
    run(
        """
        import flash_attn
        theirs = flash_attn
        try:
            shim.install("flash_attn_interface", "flash_attn")
        except ValueError as error:
            assert "flash_attn is imported already" in str(error) and "replace=True" in str(error)
        else:
            raise SystemExit("replaced")
        import sys
        assert "flash_attn_interface" not in sys.modules, "half done"
        with shim.installed("flash_attn", replace=True):
            import flash_attn
            assert flash_attn.flash_attn_func is shim.flash_attn_func
            try:
                with shim.installed():
                    raise SystemExit("nested")
            except ValueError as error:
                assert "installed already" in str(error)
        import flash_attn
        assert flash_attn is theirs
        try:
            shim.install("flash_attention")
        except ValueError as error:
            assert "flash_attn" in str(error)
        """,
        folder=tmp_path,
    )


def test_the_rest_of_an_installed_sgl_kernel_stays(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("def topk_softmax(): return 1\n")
    (tmp_path / "sgl_kernel" / "flash_attn.py").write_text("raise ImportError('no build for this machine')\n")
    run(
        """
        shim.install("sgl_kernel")
        from sgl_kernel import topk_softmax
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
        assert topk_softmax() == 1
        """,
        folder=tmp_path,
    )


def test_distributions_are_answered_only_with_metadata() -> None:
    run(
        """
        from importlib import metadata
        shim.install()
        try:
            metadata.version("flash-attn")
        except metadata.PackageNotFoundError:
            pass
        else:
            raise SystemExit("answered unasked")
        assert "flash_attn" not in metadata.packages_distributions()
        shim.install("flash_attn", metadata=True)
        assert metadata.version("flash_attn") == metadata.version("flash-attn") == "2.8.4"
        assert metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
        assert "flash_attn_interface" not in metadata.packages_distributions()
        assert metadata.version("torch")
        shim.uninstall()
        assert "flash_attn" not in metadata.packages_distributions()
        """
    )


def test_transformers_finds_it_where_it_would_use_it() -> None:
    """With CUDA (claimed here) Transformers takes FlashAttention 2 for installed and loads our functions."""
    pytest.importorskip("transformers")
    run(
        """
        shim.install(metadata=True)
        import transformers.utils.import_utils as probes
        assert not probes.is_flash_attn_2_available(), "no CUDA, no FlashAttention"
        for probe in (probes.is_flash_attn_2_available, probes.is_flash_attn_3_available):
            probe.cache_clear()
        probes.is_torch_cuda_available = lambda: True
        assert probes.is_flash_attn_2_available() and probes.is_flash_attn_3_available()
        assert probes.is_flash_attn_greater_or_equal("2.4.1")
        import transformers.modeling_flash_attention_utils as theirs
        functions, (arguments, _) = theirs.lazy_import_flash_attention("flash_attention_2")
        assert functions[0] is shim.flash_attn_func and functions[1] is shim.flash_attn_varlen_func
        assert functions[3] is shim.pad_input and functions[4] is shim.unpad_input
        takes = arguments.keywords["supports_mapping"]
        for name in ("dropout_p", "window_size", "softcap", "s_aux", "deterministic"):
            assert takes[name], name
        """
    )
