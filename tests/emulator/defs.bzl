"""What belongs to builds with the emulated device alone."""

# The target_compatible_with of what needs --config=cuda_emulation.
ONLY_EMULATED = select({
    "//tests/emulator:chosen": [],
    "//conditions:default": ["//third_party:incompatible"],
})
