// Included before all others by files whose code runs once a step at most: they are compiled for size. For
// speed they would be half as large again, and the base install has a limit.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("Os")
#endif
