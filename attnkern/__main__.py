"""``python -m attnkern``: what is installed here, and which backends can run."""

import attnkern


def main() -> None:
    for name, value in attnkern.build_info().items():
        text = " ".join(value) if isinstance(value, list) else value
        print(f"{name:<16} {text or '-'}")
    print(f"\n{'backend':<16} {'devices':<16} state")
    for backend in attnkern.backends():
        state = "available" if backend.available else backend.why_not
        print(f"{backend.name:<16} {', '.join(backend.device_types):<16} {state}")


if __name__ == "__main__":
    main()
