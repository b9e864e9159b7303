"""Other processes under ptrace(2): seized, made to call the kernel, their mappings changed."""
