// Begins a part of a batch in a GPU's queue: bench/steps.py finds it by its name among what the profiler saw.
//
// build:

extern "C" __global__ void part_begins() {}
