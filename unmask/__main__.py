"""`python -m unmask`, also under `accelerate launch -m unmask` and `torchrun -m unmask`."""

from unmask.cli import main

if __name__ == "__main__":
    main()
