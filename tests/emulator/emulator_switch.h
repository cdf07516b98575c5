// Switches from one stack to another, and reports it to AddressSanitizer: for emulator.cpp alone.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define STACK_IS_NEW(bottom, size) ASAN_UNPOISON_MEMORY_REGION(bottom, size)
#define SWITCH_BEGINS(keep, bottom, size) __sanitizer_start_switch_fiber(keep, bottom, size)
#define SWITCH_ENDS(kept, bottom, size) __sanitizer_finish_switch_fiber(kept, bottom, size)
#else
#define STACK_IS_NEW(bottom, size)
#define SWITCH_BEGINS(keep, bottom, size)
#define SWITCH_ENDS(kept, bottom, size)
#endif

// Saves what a function must keep (System V x86-64) on this stack, goes on on the other one.
extern "C" void enginewright_switch(void** from, void* to);
asm(R"(
.text
.type enginewright_switch, @function
enginewright_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size enginewright_switch, .-enginewright_switch
)");
