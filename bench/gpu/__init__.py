"""The GPU campaign, ``python -m bench.gpu`` (`make gpu`): what is to be measured and checked on a GPU, in stages."""
