"""Kernels for TPUs in the place of their plain forms, run operation by operation on a CPU."""


def launch_into(shapes):
  """A `kernels.launch` that interprets the kernel, and adds the shape of its first array to a list."""

  def launch(plain, kernel, *arrays):
    del plain
    shapes.append(arrays[0].shape)
    return kernel(*arrays, interpret=True)

  return launch
