"""``python -m attnkern``: what is installed here, and which backends can run."""

import attnkern


def main() -> None:
    for name, value in attnkern.build_info().items():
        print(f"{name:<16} {' '.join(value) if isinstance(value, list) else value}")
    print()
    for backend in attnkern.backends():
        print(backend)


if __name__ == "__main__":
    main()
