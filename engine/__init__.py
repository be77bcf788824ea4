"""Engine: schedules sequences over one radix-cached KV pool and runs the vision encoder and the language model."""
