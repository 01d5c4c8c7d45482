// Without compute no kernel has an effect, but for the few with which an engine keeps its books: what
// it reads back to count a request's tokens. Their work is done here, on a few integers a request.
#include "dispatch.h"

namespace simnpu {
namespace {
using Arguments = std::map<std::string, Tensor>;

// Integers in device memory, of either width.
class Integers {
 public:
  explicit Integers(const Tensor& t) : at_(t.data_ptr()), stride_(t.dim() ? t.stride(0) : 1), wide_(t.itemsize() == 8) {
    TORCH_CHECK(t.itemsize() == 4 || wide_, "simnpu: books of ", t.scalar_type(), " are not known; expected int32 or int64");
  }
  int64_t operator[](int64_t i) const {
    return wide_ ? static_cast<int64_t*>(at_)[i * stride_] : static_cast<int32_t*>(at_)[i * stride_];
  }
  void set(int64_t i, int64_t value) const {
    if (wide_) static_cast<int64_t*>(at_)[i * stride_] = value;
    else static_cast<int32_t*>(at_)[i * stride_] = value;
  }

 private:
  void* at_;
  int64_t stride_;
  bool wide_;
};

// Rows of one tensor, or of several whose addresses are in one, get new contents.
void apply_write(const Arguments& a) {
  Tensor out = a.at("output_ptr"), contents = a.at("write_contents_ptr");
  Integers rows(a.at("write_indices_ptr")), starts(a.at("write_starts_ptr")), ends(a.at("write_cu_lens_ptr"));
  bool several = a.count("write_group_ids_ptr");
  int64_t n = a.at("write_indices_ptr").size(0), size = contents.itemsize(), begin = 0;
  for (int64_t i = 0; i < n; begin = ends[i++]) {
    char* base = static_cast<char*>(out.data_ptr());
    int64_t stride = out.dim() > 1 ? out.stride(0) : 1;
    if (several) {
      int64_t group = Integers(a.at("write_group_ids_ptr"))[i];
      base = reinterpret_cast<char*>(Integers(out)[group]);
      stride = Integers(a.at("output_stride"))[group];
    }
    std::memcpy(base + (rows[i] * stride + starts[i]) * size,
                static_cast<char*>(contents.data_ptr()) + begin * size, (ends[i] - begin) * size);
  }
}

void prepare_lengths(const Arguments& a) {
  Integers lengths(a.at("seq_lens_ptr")), rows(a.at("idx_mapping_ptr")), starts(a.at("query_start_loc_ptr")),
      computed(a.at("num_computed_tokens_ptr"));
  int64_t n = a.at("idx_mapping_ptr").size(0);
  for (int64_t i = 0; i < a.at("seq_lens_ptr").size(0); i++)
    lengths.set(i, i < n ? computed[rows[i]] + starts[i + 1] - starts[i] : 0);
}

// One token for each request whose prompt is complete, and no rejected one.
void count_sampled(const Arguments& a) {
  Integers sampled(a.at("num_sampled_ptr")), rejected(a.at("num_rejected_ptr")), lengths(a.at("seq_lens_ptr")),
      rows(a.at("idx_mapping_ptr")), prompts(a.at("prefill_len_ptr"));
  for (int64_t i = 0; i < a.at("idx_mapping_ptr").size(0); i++) {
    sampled.set(i, lengths[i] >= prompts[rows[i]]);
    rejected.set(i, 0);
  }
}

void count_computed(const Arguments& a) {
  if (!a.count("query_start_loc_ptr")) return;
  Integers computed(a.at("num_computed_tokens_ptr")), rows(a.at("idx_mapping_ptr")),
      starts(a.at("query_start_loc_ptr"));
  for (int64_t i = 0; i < a.at("idx_mapping_ptr").size(0); i++)
    if (rows[i] >= 0) computed.set(rows[i], computed[rows[i]] + starts[i + 1] - starts[i]);
}

// Every token is 0: a real one, of any vocabulary.
void sample_nothing(const Arguments& a) {
  Tensor t = a.at("sampled_ptr");
  std::memset(t.data_ptr(), 0, t.nbytes());
}

const std::map<std::string, void (*)(const Arguments&)> books = {
    {"_apply_write_kernel", apply_write},
    {"_prepare_pos_seq_lens_kernel", prepare_lengths},
    {"_get_num_sampled_and_rejected_kernel", count_sampled},
    {"_post_update_kernel", count_computed},
    {"_post_update_num_computed_tokens_kernel", count_computed},
    {"_categorical_sample_kernel", sample_nothing},
};
// self[rows] = values, which 0.26.0rc1 fills its buffers of requests with.
void put_rows(const Stack& args) {
  const Tensor& self = args[0].toTensor();
  const Tensor& values = args[2].toTensor();
  auto indices = args[1].toOptionalTensorVector();
  if (args[3].toBool() || indices.size() != 1 || !indices[0] || !c10::isIntegralType(indices[0]->scalar_type(), false))
    return;
  const Tensor& rows = *indices[0];
  size_t row = self.dim() ? self.stride(0) * self.itemsize() : 0;
  bool plain = self.is_contiguous() && values.is_contiguous() && self.scalar_type() == values.scalar_type() &&
               rows.dim() == 1 && values.nbytes() == rows.numel() * row && values.nbytes() <= kSmall;
  if (!plain) return;
  Integers at(rows);
  for (int64_t i = 0; i < rows.numel(); i++)
    if (at[i] >= 0 && at[i] < self.size(0))
      std::memcpy(static_cast<char*>(self.data_ptr()) + at[i] * row, static_cast<char*>(values.data_ptr()) + i * row, row);
}

}  // namespace

bool computes() { return simnpu_computes; }

OperatorBooks operator_books(const std::string& name) {
  return name == "aten::index_put_" || name == "aten::_index_put_impl_" ? put_rows : nullptr;
}

std::vector<std::string> kernels_with_books() {
  std::vector<std::string> names;
  for (auto& b : books) names.push_back(b.first);
  return names;
}

void keep_books(const std::string& kernel, const Arguments& arguments) {
  auto keep = books.at(kernel);
  launch("triton::" + kernel, [=] { keep(arguments); });
}
}  // namespace simnpu
