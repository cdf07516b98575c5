// The kernels in portable C++, for any machine.
#include "dispatch.h"
#include "table.h"

namespace enginewright {

KernelTable portable_table() { return make_table<Portable>(product_table<Portable>()); }

}  // namespace enginewright
