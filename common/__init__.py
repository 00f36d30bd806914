"""Parts that the commands share: flags, processes, the compilation cache, and files that they read and write."""
